"""Which values a server's device holds, which are evicted first when memory is short, and how they are restored."""
