// The rows of an indexer's call and where their requests' keys lie, as dsa/device.rs puts them on a device.
#pragma once

#include "ptx.cuh"

// The most groups of row arrays that a table has, in bytes from its start; dsa/table.rs says what each is.
struct Table {
    u32 rows, requests;
    u32 keys;  // most that a row sees
    u32 reserved;
    u32 request_at, position_at;                // [rows] i32
    u32 page_begin_at, page_at;                 // [requests + 1] i32, page ids
    u32 page_start_at, stored_at;               // [requests] i32
    u32 few_at, many_at;                        // [rows + 1] i32: rows before, of requests of few rows and of many
};
static_assert(sizeof(Table) == 48, "as in dsa/device.rs");

DEVICE const i32* table_array(const Table* table, u32 at) {
    return reinterpret_cast<const i32*>(reinterpret_cast<const u8*>(table) + at);
}
// A row's request, or -1.
DEVICE i32 request_of(const Table* table, u32 row) { return table_array(table, table->request_at)[row]; }
// Of rows first..row: those of requests of few rows, and of many.
DEVICE u32 few_rows(const Table* table, u32 first, u32 row) {
    const i32* few = table_array(table, table->few_at);
    return u32(few[row] - few[first]);
}
DEVICE u32 many_rows(const Table* table, u32 first, u32 row) {
    const i32* many = table_array(table, table->many_at);
    return u32(many[row] - many[first]);
}
// Keys that a row sees.
DEVICE u32 seen_of(const Table* table, u32 row) {
    // Both are asked for at once.
    const u32 position = load_here(reinterpret_cast<const u32*>(table_array(table, table->position_at)) + row);
    return request_of(table, row) < 0 ? 0 : position + 1;
}

// A request's slots: key `j` is at offset `start + j` of its pages.
struct Slots {
    const i32* pages;
    u32 start, stored;
};
DEVICE Slots slots_of(const Table* table, i32 request) {
    const i32* begin = table_array(table, table->page_begin_at);
    return Slots{table_array(table, table->page_at) + begin[request], u32(table_array(table, table->page_start_at)[request]),
                 u32(table_array(table, table->stored_at)[request])};
}
// Where key `key` lies in a pool of pages of S slots, in units of the strides.
DEVICE i64 slot_at(const Slots& slots, u32 key, u32 S, i64 page_stride, i64 slot_stride) {
    u32 offset = slots.start + key;
    return i64(slots.pages[offset / S]) * page_stride + i64(offset % S) * slot_stride;
}
