# Run by the build: writes the revision of SOURCE as a C++ string literal to OUT, touching the file only when it changed.
find_program(GIT git)
set(revision unknown)
if(GIT)
  execute_process(COMMAND ${GIT} -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=* OUTPUT_VARIABLE answer OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(revision ${answer})
  endif()
endif()
file(CONFIGURE OUTPUT ${OUT} CONTENT "\"${revision}\"\n")
