// The precompiled headers of tests, compiled by themselves: here the compiler warns about them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "testing.h"
