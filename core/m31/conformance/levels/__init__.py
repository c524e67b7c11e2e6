"""Items by level: each module has `items(manifest)`, which makes nothing but the items."""
