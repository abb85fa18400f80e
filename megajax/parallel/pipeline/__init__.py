"""Pipeline parallelism: the schedule of the stages (`schedule`) and the program that runs it (`executor`)."""
