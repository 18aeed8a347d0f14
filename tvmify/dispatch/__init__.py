"""The path of a call, from its signature to an executor. Begin with `dispatcher`.

every call                  dispatcher, memory, undescribed
whose calls they are        subject, dispatcher_state, module_state, replay
a miss                      misses, attempt, request, outcome, recording/
what one program serves     generality/, examples
caches and the compiler     load_or_build, work, programs, keys, sources, fit, on_miss, building/
whether a program is used   proof, acceptance, agreement, verdict
calls that run by parts     partition, parts, regions, submodules
what a user sees            explaining, explanation, counts, reporting, reasons, progress
saved files                 files
"""
