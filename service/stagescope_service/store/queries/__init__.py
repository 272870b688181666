"""Queries of the catalogue: one class per noun, combined in `store.catalogue.Catalogue`."""
