// How the HDF5 library reaches the disk.
//
// The library's own driver has three faults for a trainer. A write that fails while a file is flushed or closed leaves
// the library with a file it can neither close nor forget: the descriptor stays open, a crash may follow, and
// H5Fclose may still return success. File locks fail on file systems that have none. And nothing can be stopped
// between two writes to see what a killed process leaves behind. This driver keeps the first error for the owner
// of the file to report and takes every later write silently, so that the library can always finish and close; it
// takes no locks; and each change of the file passes count_file_operation.
#pragma once

#include <hdf5.h>

#include <string>

namespace palimpsest {

// What the driver and the owner of an open file share. Its address must not change while the file is open.
struct Hdf5FileState {
  std::string path;
  std::string error;       // the first failure; the file's later changes are dropped
  bool abandoned = false;  // set by the owner: drop every later change
};

// Makes `file_access` (a file access property list) use the driver with this state.
herr_t set_hdf5_driver(hid_t file_access, Hdf5FileState& state);

}  // namespace palimpsest
