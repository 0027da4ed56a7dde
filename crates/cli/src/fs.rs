//! `nacre fs`, and `zfs`: the command lines of file systems in pools, and the form of the output.
//! The meaning of the verbs is in `nacre_admin::fs`; nothing here accesses a pool or a mount
//! itself.
//!
//! ```text
//!  command  the command line                         run    asks the processes that own the pools, prints
//!  args     its arguments: names, properties         list   tables and JSON of list and get
//!  owners   names of users and groups                diff   lines of diff
//!  value    values as people read them               streams, replicate   send, receive, replicate
//!  versions versions of a file in snapshots
//! ```

pub mod args;
mod ask;
pub mod command;
mod diff;
mod json;
mod keep;
mod list;
mod owners;
mod replicate;
pub mod run;
mod space;
pub mod streams;
#[cfg(test)]
mod tests;
mod value;
mod versions;
