"""Methods: one file each, found by name; nothing else to edit."""
