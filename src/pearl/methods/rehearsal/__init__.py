"""Methods that store images of past tasks and rehearse them."""
