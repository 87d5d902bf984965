"""Programs that write what the documents show, and check the house."""
