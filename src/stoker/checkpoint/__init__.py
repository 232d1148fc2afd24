"""The checkpoint stage: snapshot, write, commit, drain; and back again."""
