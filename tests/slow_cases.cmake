# Cases of sweeps over layouts of ranks, recipes on them and shapes of GEMMs that have the label slow, as filters of GoogleTest by executable.
# The cases that the suite keeps take the same paths, except where this file says so. A new case of a sweep is in the suite.

set(slow_of_backend_tests GemmShapes.*/2 GemmShapes.*/3 GemmShapes.*/4 GemmShapes.*/5)

set(slow_of_model_tests "")
foreach(case bias values te simulated fp8_block)
  list(APPEND slow_of_model_tests ExpertRanks.Learn*/${case})
endforeach()

set(slow_of_reliability_tests StoppedRun.LeavesAnExportThatIsNotMadeWithinItsGrace)  # it waits for 20 s
set(slow_of_distributed_tests Failures.ARankThatIsKilledBeforeTheLastHasComeEndsTheOthers)

# Each layout and each model has another case.
set(slow_of_integration_tests "")
foreach(case dp1tp1_fp8_block dp2tp1_sigmoid dp4tp1_gather dp1tp2_high dp1tp2sp_softmax dp2tp1ep2_biases dp4tp1ep2_sigmoid dp2tp2sp_gather)
  list(APPEND slow_of_integration_tests Layouts/DevicesOnRanks.*/${case})
endforeach()
