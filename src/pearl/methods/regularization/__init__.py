"""Methods that store no images and regularise the network towards its earlier weights or outputs."""
