"""Looking inside anyone's attention: capture, statistics, head kinds, causes, figures, the report."""
