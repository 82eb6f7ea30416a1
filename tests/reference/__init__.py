"""What the tests compare with: models in plain torch, and unsplit views of split models."""
