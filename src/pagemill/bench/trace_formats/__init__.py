"""One file a format of traces: ``is_it`` looks at the first row, ``read`` gives the requests."""
