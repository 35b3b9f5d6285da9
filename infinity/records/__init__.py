"""One unit's fields: where they lie, their checksums, how masters and update rules read them."""
