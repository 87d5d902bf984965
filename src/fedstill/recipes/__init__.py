"""Recipes: configurations that come with the library."""
