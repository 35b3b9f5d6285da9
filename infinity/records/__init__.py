"""One unit's fields: where they are stored, their checksums, and how masters and update rules use them."""
