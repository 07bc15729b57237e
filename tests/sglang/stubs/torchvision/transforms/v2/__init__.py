"""Imported, never called."""
