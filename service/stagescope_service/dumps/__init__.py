"""Reading what capture tools wrote: files in, tables out; neither Ray nor the catalogue."""
