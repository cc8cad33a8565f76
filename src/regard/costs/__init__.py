"""What a declaration, a module or a model costs: parameters, operations, bytes; as numbers and as formulas."""
