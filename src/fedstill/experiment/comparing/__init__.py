"""Several runs side by side: methods, settings and seeds, or the cells of a paper's table."""
