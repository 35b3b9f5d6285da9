"""What a training needs and takes, from its outline, and how far such plans are from what was measured."""
