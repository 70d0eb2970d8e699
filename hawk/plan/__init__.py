"""The plan: pure functions from two layouts, two block tables and a token range to what moves where."""
