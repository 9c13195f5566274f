//! Cases built in the test, and what is wrong with them.
