"""Gin files, and `binding`, which turns them into dataclasses."""
