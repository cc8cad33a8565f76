"""`rg.look`: attention calls of any model are recorded; statistics, head kinds, ablation, figures, an HTML report."""
