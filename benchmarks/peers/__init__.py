"""Other systems on the same work, each as its documentation or its own trainer uses it, tuned in
its favour.
"""
