"""Effects: published, priced workflows, as customers see them."""
