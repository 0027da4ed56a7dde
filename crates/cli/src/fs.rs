//! `nacre fs`, and `zfs`: the command lines of file systems in pools, and how answers look. What
//! the verbs mean is in `nacre_admin::fs`; here is neither a pool nor a mount.
//!
//! ```text
//!  command  the command line                         run    asks the processes that own the pools, prints
//!  words    what stands in it: names, properties     list   tables and JSON of list and get
//!  owners   names of users and groups                diff   lines of diff
//!  value    values as people read them               streams, replicate   send, receive, replicate
//!  versions what a file was in snapshots
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
