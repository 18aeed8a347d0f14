"""The path of a call, from its signature to an executor. Begin with `dispatcher`.

every call                  dispatcher, outcomes (the memory cache), undescribed
whose calls they are        subject, module_state, replay
a miss                      misses, miss, request, outcome, recording/
what one program serves     generalizing, numbers, sizes, sizes_and_numbers, symbols, hints,
                            declared, examples
caches and the compiler     load_or_build, programs, keys, sources, fit, on_miss, background,
                            allowance, building/
whether a program is used   proof, acceptance, agreement, verdict
calls that run by parts     parts, regions, submodules
what a user sees            explanation, explained, counts, reporting, reasons, progress
saved files                 files
"""
