"""What rows say: cells, places, settings, ratios, limits. No HTML and no matplotlib."""
