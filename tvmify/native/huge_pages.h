// Memory for packed weights, in huge pages.
#pragma once

#include <ATen/core/Tensor.h>

namespace tvmify {

// Moves tensors, one after the other, into one piece of memory that lives as long as any of them;
// or leaves them where they are, if together they fill no huge page.
//
// A call reads each weight from memory once, and finding each page takes a walk through the page
// tables. With pages of 2 MB instead of 4 KB, products of few rows are faster by a tenth to a
// third. Linux hands them out to memory that asks for them before it is used.
void move_to_huge_pages(at::ArrayRef<at::Tensor*> tensors);

}  // namespace tvmify
