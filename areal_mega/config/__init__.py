"""The closed recipe schema, its loading (`extends`, dotted overrides), and where each value came from."""
