"""The diffusers attention processor and the patch that installs it."""
