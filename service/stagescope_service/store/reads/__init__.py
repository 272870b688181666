"""What the catalogue answers, a file a noun; `catalogue.Catalogue` is all of them."""
