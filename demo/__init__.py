"""Two real vLLM servers on one memory budget, and the proof that their tokens are the unmodified engine's."""
