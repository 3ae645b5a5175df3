"""Code that methods of several families share."""
