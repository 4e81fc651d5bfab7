"""The rules, searches and policies that choose plans."""
