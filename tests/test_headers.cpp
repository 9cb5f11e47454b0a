// What is precompiled for tests, compiled by itself: here the compiler warns about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"
