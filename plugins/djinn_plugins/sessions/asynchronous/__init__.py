"""djinn from event loops: sessions, values and calls that can be awaited on asyncio and on trio."""
