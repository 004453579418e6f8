"""The learner: replay, loss, gradient, update, checkpoint and the commands around them."""
