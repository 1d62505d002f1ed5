"""What drafts in the step that verifies: a draft model, or a draft head."""
