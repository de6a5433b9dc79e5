"""Real connections and real processes, at the same moment."""
