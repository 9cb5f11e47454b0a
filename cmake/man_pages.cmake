# Writes a compressed manual page of mantissa and of each of its subcommands into OUTPUT, from the output of PROGRAM --help. HELP2MAN,
# VERSION.
execute_process(COMMAND ${PROGRAM} --help OUTPUT_VARIABLE help COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE ".*\nSubcommands:\n" "" commands "${help}")
string(REGEX REPLACE "\n\n.*" "" commands "${commands}")
string(REPLACE ";" "," commands "${commands}")
string(REPLACE "\n" ";" commands "${commands}")

function(write_page name summary)  # and the words of the command
  list(JOIN ARGN " " command)
  set(page ${OUTPUT}/${name}.1)
  execute_process(COMMAND ${HELP2MAN} --no-info --name=${summary} --version-string=${VERSION} --source=mantissa --output=${page} ${command}
                  COMMAND_ERROR_IS_FATAL ANY)
  file(READ ${page} text)  # help2man takes the names from the version and the words of the command
  string(REGEX REPLACE "\n\\.TH [^\n]* \"1\"" "\n.TH ${name} \"1\"" text "${text}")
  string(REGEX REPLACE "\n\\.SH NAME\n[^\n]* \\\\- " "\n.SH NAME\n${name} \\\\- " text "${text}")
  file(WRITE ${page} "${text}")
  execute_process(COMMAND gzip -9n ${page} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${OUTPUT})
file(MAKE_DIRECTORY ${OUTPUT})
write_page(mantissa "trainer for GPT models in MXFP8 and MXFP4" ${PROGRAM})
foreach(line ${commands})
  if(NOT line MATCHES "^  ([a-z]+) +(.*)$")
    message(FATAL_ERROR "mantissa --help: no subcommand and its summary: ${line}")
  endif()
  write_page(mantissa-${CMAKE_MATCH_1} "${CMAKE_MATCH_2}" ${PROGRAM} ${CMAKE_MATCH_1})
endforeach()
