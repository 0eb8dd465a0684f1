// A target must have a source.
