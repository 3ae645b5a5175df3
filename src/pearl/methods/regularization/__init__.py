"""Methods that keep no images and hold the network to what it was or said."""
