"""Real servers, started as a user starts them, compared with the unmodified engine.

``python -m tests.e2e.matrix`` runs the correctness matrix, ``python -m tests.e2e.pair`` the elastic pair.
"""
