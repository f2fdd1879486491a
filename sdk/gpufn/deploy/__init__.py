"""Deploys: bundle the code, upload models, create a revision, wait for its check."""
