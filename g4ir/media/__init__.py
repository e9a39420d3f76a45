"""Images, videos and sound: decoded with limits, then made into what the towers take."""
