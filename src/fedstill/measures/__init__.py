"""Measures of a run: what each looks at after a stage, and the plain numbers it gives the journal."""
