"""FLOPs of declarations, term by term, and of any module, by tracing it."""
