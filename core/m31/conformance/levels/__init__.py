"""The items of each level: modules with `items(manifest) -> Iterator[Item]`."""
